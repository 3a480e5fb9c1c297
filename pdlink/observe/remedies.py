"""What to do where decode computed a prompt itself, by the reason in X-Pdlink-KV."""

from __future__ import annotations

RECOMPUTED = {
    "no_prefill": "no prefill worker is healthy; start one",
    "peer_lost": "decode lost its prefill worker on the way; read that worker's log, and `pdlink explain ID`",
    "not_connected": "decode cannot reach the prefill worker's control address; set listen or listen.advertise",
    "deadline": "the KV came too late; raise timeouts.request_s, or add prefill workers",
    "no_offer": "decode has no free blocks; raise cache.num_blocks, or add decode workers",
}
