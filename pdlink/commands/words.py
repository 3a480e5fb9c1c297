"""What the command line says of itself."""

from __future__ import annotations

_EXAMPLES: dict[str, tuple[str, str]] = {
    "proxy": ("queue_size=64", "policy=cost"),
    "store": ("tiers.max_local_cpu_size=16", "tiers.ttl_s=3600"),
    "up": ("prefill.cache.num_blocks=2048", "decode.transport.kind=tcp"),
}


def settings_help(command: str) -> str:
    """What stands below the options of a command with settings; the examples are settings of that command."""
    one, other = _EXAMPLES.get(command, ("cache.num_blocks=2048", "transport.kind=ucx"))
    key, _, value = one.partition("=")
    return f"""\
Later ones win: defaults, --config FILE (YAML), the environment
(PDLINK_{key.upper().replace(".", "__")}={value}), flags. --set reaches every setting:
  --set {one} --set {other}
"""


FLAGS: dict[str, tuple[str, str]] = {
    "--listen": (
        "listen",
        "address where others reach it (127.0.0.1; the proxy on port 8000); port 0 takes a free one",
    ),
    "--name": ("name", "name of this worker, unique in the deployment"),
    "--model": (
        "model.path",
        "local directory or hub id of a transformers causal LM (a small one)",
    ),
    "--token": (
        "security.token_file",
        "file with a secret that all workers and the proxy share; their keys are derived from it",
    ),
    "--transport": ("transport.kind", "auto, mapped, ucx or tcp (auto: the best that both sides have)"),
    "--on-transfer-failure": (
        "on_transfer_failure",
        "what decode does if the KV does not come: recompute or fail (recompute)",
    ),
}

LABORATORY: dict[str, str] = {
    "bench": "measure this machine and this link",
    "chaos": "break a deployment on purpose, and judge what its clients see",
}
"""Commands of another distribution, pdlink-bench: entry points of the group `pdlink.commands`."""


DESCRIPTIONS: dict[str, str] = {
    "up": """\
Start a proxy with prefill and decode workers on this machine and print a URL and a curl line. Restart a process that
dies, until Ctrl-C. Without --model it uses the small one that comes with pdlink: no download, no GPU.

  pdlink up                                  one prefill and one decode worker
  pdlink up --prefill 2 --decode 3 --model DIR_OR_HUB_ID
  pdlink up --engine vllm --model DIR_OR_HUB_ID         or --engine sglang
""",
    "prefill": """\
Serve the prefill leg of requests: compute a prompt's KV and write it into the memory of the decode worker that the
proxy names. Needs decode workers and a proxy.

  pdlink prefill --listen 10.0.0.1:8100 --model DIR_OR_HUB_ID
  pdlink prefill --config configs/prefill.yaml
""",
    "decode": """\
Serve the decode leg of requests: receive a prompt's KV from a prefill worker, and make the tokens that follow. Needs
prefill workers and a proxy; alone, it computes prompts itself.

  pdlink decode --listen 10.0.0.2:8200 --model DIR_OR_HUB_ID
  pdlink decode --config configs/decode.yaml
""",
    "both": """\
Serve either leg of requests, and whole ones. A proxy may list it on both sides.

  pdlink both --listen 10.0.0.1:8100 --model DIR_OR_HUB_ID
""",
    "proxy": """\
Serve OpenAI's API in front of prefill and decode workers: each request goes to one of each. Workers may start
later, and may come and go. The page for people is /pdlink/; health is at /health, /readyz and /livez.

  pdlink proxy --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200
  pdlink proxy --config configs/proxy.yaml
""",
    "store": """\
Keep the KV of prompts for all workers of this host. Workers connect to its socket (their setting tiers.store); what
it keeps outlives them.

  pdlink store --memory 16 --disk /var/tmp/kv --disk-size 200
  pdlink prefill --set tiers.store=ipc:///tmp/pdlink-1000/store.sock
""",
    "check": """\
Try every transport on this machine, and say why one does not work. Then the facts of this machine.

exit status: 0 the configured transport works (with auto: one of them), 1 it does not, 2 wrong usage or settings
""",
}
"""What a command does, with examples; before its options."""
