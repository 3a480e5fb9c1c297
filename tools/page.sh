#!/bin/sh
# Fetch what the proxy's page takes from others (uPlot, with its licence) into static/vendor/, which git ignores.
set -eu
page="$(dirname "$0")/../proxy/pdlink_proxy/page"
fetched="$(mktemp -d)"
trap 'rm -rf "$fetched"' EXIT
cp "$page/package.json" "$page/package-lock.json" "$fetched"
npm ci --prefix "$fetched" --silent --no-audit --no-fund --ignore-scripts
mkdir -p "$page/static/vendor"
cp "$fetched/node_modules/uplot/dist/uPlot.esm.js" "$fetched/node_modules/uplot/dist/uPlot.min.css" "$page/static/vendor/"
cp "$fetched/node_modules/uplot/LICENSE" "$page/static/vendor/uPlot.LICENSE"
