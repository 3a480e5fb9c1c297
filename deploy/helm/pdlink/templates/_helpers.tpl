{{- define "pdlink.name" -}}
{{- if contains "pdlink" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-pdlink" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{/* What all selectors have. */}}
{{- define "pdlink.instance" -}}
app.kubernetes.io/name: pdlink
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pdlink.labels" -}}
{{ include "pdlink.instance" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* Selector of the pods of a pool: root, name. */}}
{{- define "pdlink.ofPool" -}}
{{ include "pdlink.instance" .root }}
app.kubernetes.io/component: worker
pdlink/pool: {{ .name }}
{{- end }}

{{- define "pdlink.ofProxy" -}}
{{ include "pdlink.instance" . }}
app.kubernetes.io/component: proxy
{{- end }}

{{/* The Service by which proxies find a pool. The controller of LeaderWorkerSets makes one of the set's own name, with
all pods of all groups and before they are ready, so ours has another. Root, name, pool. */}}
{{- define "pdlink.service" -}}
{{ include "pdlink.name" .root }}-{{ .name }}{{ if eq .pool.kind "LeaderWorkerSet" }}-leaders{{ end }}
{{- end }}

{{/* A pool with the defaults, as JSON: root, name. */}}
{{- define "pdlink.pool" -}}
{{ mergeOverwrite (deepCopy .root.Values.poolDefaults) (deepCopy (index .root.Values.pools .name)) | toJson }}
{{- end }}

{{/* What pdlink must be told where no keys are used. */}}
{{- define "pdlink.insecure" -}}
{{- if not .Values.keys.secret }}true{{ end }}
{{- end }}

{{/* Settings of a worker, as JSON: root, name, pool. */}}
{{- define "pdlink.workerSettings" -}}
{{- $values := .root.Values }}
{{- $security := dict }}
{{- if $values.keys.secret }}
{{- $security = dict "key_file" "/etc/pdlink/key" "allow_file" "/etc/pdlink/allowed/allow" }}
{{- else }}
{{- $security = dict "insecure" true }}
{{- end }}
{{- if $values.httpKey.secret }}{{ $_ := set $security "http_key_file" "/etc/pdlink/http/key" }}{{ end }}
{{- $all := dict "listen" (dict "address" (printf "%s:%d" $values.listen (int .pool.port)) "control" (printf "%s:%d" $values.listen (int .pool.controlPort))) "timeouts" (dict "drain_s" .pool.drainS) "security" $security }}
{{- mergeOverwrite $all (deepCopy .pool.settings) | toJson }}
{{- end }}

{{- define "pdlink.proxySettings" -}}
{{- $values := .Values }}
{{- $all := dict "listen" (printf "%s:%d" $values.listen (int $values.proxy.port)) "routers" (max 1 (int $values.proxy.replicas)) }}
{{- if $values.httpKey.secret }}{{ $_ := set $all "worker_key_file" "/etc/pdlink/http/key" }}{{ end }}
{{- if $values.proxy.apiKeys.secret }}{{ $_ := set $all "api_key_file" "/etc/pdlink/api/keys" }}{{ end }}
{{- if $values.proxy.adminKeys.secret }}{{ $_ := set $all "admin_key_file" "/etc/pdlink/admin/keys" }}{{ end }}
{{- if $values.proxy.tls.secret }}
{{- $_ := set $all "tls_cert" "/etc/pdlink/tls/tls.crt" }}
{{- $_ := set $all "tls_key" "/etc/pdlink/tls/tls.key" }}
{{- end }}
{{- $found := list }}
{{- range $name, $_ := $values.pools }}
{{- $pool := include "pdlink.pool" (dict "root" $ "name" $name) | fromJson }}
{{- $service := include "pdlink.service" (dict "root" $ "name" $name "pool" $pool) }}
{{- $source := printf "kubernetes:%s=%s,port=http" $pool.role $service }}
{{- if and (eq (get $values.proxy.settings "dialect" | toString) "vllm") (eq $pool.role "prefill") }}
{{- $source = printf "%s,control=control" $source }}
{{- if gt (int $pool.engines) 1 }}{{ $source = printf "%s,data_parallel=%d" $source (int $pool.engines) }}{{ end }}
{{- end }}
{{- if $pool.cell }}{{ $source = printf "%s,cell=%s" $source $pool.cell }}{{ end }}
{{- $found = append $found $source }}
{{- end }}
{{- $_ := set $all "discover" $found }}
{{- mergeOverwrite $all (deepCopy $values.proxy.settings) | toJson }}
{{- end }}

{{/* Ports of a worker's control plane, one for each rank of each engine: pool, field. */}}
{{- define "pdlink.controlPorts" -}}
{{- range $rank := until (mul .pool.ranks .pool.engines | int) }}
- {name: {{ $rank | eq 0 | ternary "control" (printf "control-%d" $rank) }}, {{ $.field }}: {{ add (int $.pool.controlPort) $rank }}}
{{- end }}
{{- end }}

{{/* Mounts of Secrets, as JSON: {volumes, mounts}. root, key (file of the key pair in keys.secret, or empty), proxy. 288
is 0440: pdlink refuses keys that every user can read. */}}
{{- define "pdlink.secrets" -}}
{{- $values := .root.Values }}
{{- $volumes := list (dict "name" "settings" "configMap" (dict "name" .settings)) }}
{{- $mounts := list (dict "name" "settings" "mountPath" "/etc/pdlink/settings" "readOnly" true) }}
{{- if and $values.keys.secret .key }}
{{- $volumes = append $volumes (dict "name" "keys" "secret" (dict "secretName" $values.keys.secret "defaultMode" 288)) }}
{{- $volumes = append $volumes (dict "name" "allowed" "secret" (dict "secretName" $values.keys.secret "defaultMode" 288 "items" (list (dict "key" "allow" "path" "allow")))) }}
{{- $mounts = append $mounts (dict "name" "keys" "mountPath" "/etc/pdlink/key" "subPathExpr" .key "readOnly" true) }}
{{- $mounts = append $mounts (dict "name" "allowed" "mountPath" "/etc/pdlink/allowed" "readOnly" true) }}
{{- end }}
{{- $more := dict "http" $values.httpKey.secret }}
{{- if .proxy }}{{ $more = dict "http" $values.httpKey.secret "api" $values.proxy.apiKeys.secret "admin" $values.proxy.adminKeys.secret "tls" $values.proxy.tls.secret }}{{ end }}
{{- range $name, $secret := $more }}
{{- if $secret }}
{{- $volumes = append $volumes (dict "name" $name "secret" (dict "secretName" $secret "defaultMode" 288)) }}
{{- $mounts = append $mounts (dict "name" $name "mountPath" (printf "/etc/pdlink/%s" $name) "readOnly" true) }}
{{- end }}
{{- end }}
{{- dict "volumes" $volumes "mounts" $mounts | toJson }}
{{- end }}

{{/* The pod of a worker: root, name, pool, leads (whether it answers HTTP). */}}
{{- define "pdlink.workerPod" -}}
{{- $values := .root.Values }}
{{- $pool := .pool }}
{{- $own := empty $pool.args }}
{{- $settings := include "pdlink.workerSettings" . | fromJson }}
{{- $drain := $pool.drainS }}
{{- $secrets := dict "volumes" (list) "mounts" (list) }}
{{- if $own }}
{{- $drain = $settings.timeouts.drain_s }}
{{- $secrets = include "pdlink.secrets" (dict "root" .root "key" "$(POD_NAME).key" "settings" (printf "%s-%s" (include "pdlink.name" .root) .name)) | fromJson }}
{{- end }}
{{- $volumes := concat $secrets.volumes $pool.volumes }}
{{- $mounts := concat $secrets.mounts $pool.volumeMounts }}
{{- if $pool.sharedMemory }}
{{- $volumes = append $volumes (dict "name" "shm" "emptyDir" (dict "medium" "Memory" "sizeLimit" $pool.sharedMemory)) }}
{{- $mounts = append $mounts (dict "name" "shm" "mountPath" "/dev/shm") }}
{{- end }}
{{- $wait := $pool.preStopS }}
{{- if not .leads }}{{ $wait = add (int $pool.preStopS) (ceil $drain | int) }}{{ end }}
metadata:
  labels:
    {{- include "pdlink.ofPool" . | nindent 4 }}
    pdlink/role: {{ $pool.role }}
  {{- $notes := deepCopy $pool.annotations }}
  {{- if $own }}{{ $_ := set $notes "pdlink/settings" (toJson $settings | sha256sum) }}{{ end }}
  {{- with $notes }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- $spec := dict "hostPID" $pool.mappedMemory }}
  {{- with $values.imagePullSecrets }}{{ $_ := set $spec "imagePullSecrets" . }}{{ end }}
  {{- toYaml (mergeOverwrite $spec (deepCopy $pool.pod)) | nindent 2 }}
  # A Service named pdlink-… would set PDLINK_… variables, which are settings.
  enableServiceLinks: false
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ add (int $pool.preStopS) (ceil $drain | int) 10 }}
  securityContext: {{- toYaml $values.podSecurityContext | nindent 4 }}
  {{- with $volumes }}
  volumes: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: worker
      image: {{ $pool.image | default $values.image | quote }}
      imagePullPolicy: {{ $values.imagePullPolicy }}
      {{- if not .leads }}
      {{- with $pool.groupCommand }}
      command: {{- toYaml . | nindent 8 }}
      {{- end }}
      args: {{- toYaml $pool.groupArgs | nindent 8 }}
      {{- else if $own }}
      args: [{{ $pool.role }}, --config, /etc/pdlink/settings/pdlink.yaml, --name, $(POD_NAME), --set, listen.advertise=$(POD_IP)]
      {{- else }}
      {{- with $pool.command }}
      command: {{- toYaml . | nindent 8 }}
      {{- end }}
      args: {{- toYaml $pool.args | nindent 8 }}
      {{- end }}
      env:
        - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        {{- with $pool.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      securityContext: {{- toYaml $values.securityContext | nindent 8 }}
      {{- with $pool.resources }}
      resources: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $mounts }}
      volumeMounts: {{- toYaml . | nindent 8 }}
      {{- end }}
      lifecycle: {preStop: {exec: {command: [sleep, {{ $wait | toString | quote }}]}}}
      {{- if .leads }}
      ports:
        - {name: http, containerPort: {{ $pool.port }}}
        {{- include "pdlink.controlPorts" (dict "pool" $pool "field" "containerPort") | nindent 8 }}
        {{- range $name, $port := $pool.extraPorts }}
        - {name: {{ $name }}, containerPort: {{ $port }}}
        {{- end }}
      startupProbe: {httpGet: {path: {{ $pool.probes.live }}, port: http}, periodSeconds: 5, failureThreshold: {{ ceil (divf $pool.startupS 5) | int }}}
      livenessProbe: {httpGet: {path: {{ $pool.probes.live }}, port: http}, timeoutSeconds: 5, failureThreshold: 6}
      readinessProbe: {httpGet: {path: {{ $pool.probes.ready }}, port: http}, periodSeconds: 2, timeoutSeconds: 2}
      {{- end }}
{{- end }}
