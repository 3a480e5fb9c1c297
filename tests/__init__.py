"""Tests of pdlink, with the servers that tools/servers.sh has unpacked in this environment."""

import os
import sys

os.environ["PATH"] += f"{os.pathsep}{sys.prefix}/servers/bin"
