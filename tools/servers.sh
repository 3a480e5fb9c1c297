#!/bin/sh
# Unpack the servers that tests start (Redis, Prometheus, Chromium) from Debian's packages into a directory, without
# root: nothing is installed, started or enabled, and what this machine has is left out. 240 MB where it has nothing.
set -eu
packages=""
has() { command -v "$1" > /dev/null; }
has valkey-server || has redis-server || packages="redis-server"
has prometheus || packages="$packages prometheus"
has chromium || has chromium-browser || packages="$packages chromium"
[ -n "$packages" ] || exit 0
mkdir -p "$1/apt/lists/partial" "$1/apt/cache/archives/partial" "$1/bin"
place="$(cd "$1" && pwd)"

apt() {
	apt-get -qq -o Dir::State::Lists="$place/apt/lists" -o Dir::Cache="$place/apt/cache" -o Debug::NoLocking=1 \
		-o APT::Sandbox::User="$(id -un)" "$@"
}

apt update
# shellcheck disable=SC2086  # each word is a package
apt install --download-only -y --no-install-recommends $packages
for package in "$place"/apt/cache/archives/*.deb; do
	dpkg-deb -x "$package" "$place/root"
done
rm -rf "$place/apt"

# Each program finds the libraries and fonts of its package beside it.
libraries="$(find "$place/root" -name '*.so*' -printf '%h\n' | sort -u | tr '\n' ':')"
for path in bin/redis-server bin/prometheus bin/promtool lib/chromium/chromium; do
	[ -e "$place/root/usr/$path" ] || continue
	program="$place/bin/$(basename "$path")"
	cat > "$program" <<-SCRIPT
		#!/bin/sh
		export LD_LIBRARY_PATH="$libraries\$LD_LIBRARY_PATH"
		export XDG_DATA_HOME="$place/root/usr/share"
		[ -e /etc/fonts ] || export FONTCONFIG_PATH="$place/root/etc/fonts"
		exec "$place/root/usr/$path" "\$@"
	SCRIPT
	chmod +x "$program"
done
