import sys

import numpy as np

import pdlink

LAYERS, TOKENS = 4, 100
LAYOUT = pdlink.paged_layout(
    dtype="float32", itemsize=4, num_layers=LAYERS, num_blocks=64, block_tokens=16, num_heads=8, head_dim=64
)
KV = pdlink.KVGroups((LAYOUT,))
PATIENT = pdlink.Deadlines(lease_s=60, other_leg_s=60)  # somebody starts the two by hand


def compute(layer, part):
    """Stands for the forward pass: K (part 0) or V (part 1) of 7 blocks, which hold 100 tokens."""
    return np.random.default_rng(2 * layer + part).standard_normal((7, 16, 8, 64), np.float32)


def prefill(host, port):
    listen = pdlink.LinkListen(address=f"{host}:{port}")
    with pdlink.Node("prefill-0", KV, listen=listen, deadlines=PATIENT, insecure=True) as node:
        print("prefill listens on", node.address, flush=True)
        blocks = [5, 3, 40, 8, 1, 60, 2]
        with node.send("request-1", [blocks], TOKENS) as outgoing:
            for layer in range(LAYERS):
                for part in range(2):
                    node.pages(layer, part).view(np.float32)[blocks] = compute(layer, part)
                outgoing.layer_ready(layer)  # its bytes leave now, while the next layer is computed
            outgoing.finish(first_token=42)
            outgoing.wait(timeout_s=60)


def decode(host, peer):
    listen = pdlink.LinkListen(address=host)
    with pdlink.Node("decode-0", KV, listen=listen, deadlines=PATIENT, insecure=True) as node:
        blocks = [0, 1, 2, 3, 10, 11, 12]
        with node.receive("request-1", peer, [blocks], range(TOKENS)) as incoming:
            for layer in range(LAYERS):
                incoming.wait_layer(layer, timeout_s=60)
                for part in range(2):
                    kv = node.pages(layer, part).view(np.float32)[blocks]
                    assert np.array_equal(
                        kv.reshape(-1, 512)[:TOKENS], compute(layer, part).reshape(-1, 512)[:TOKENS]
                    )
            print(f"{TOKENS} tokens are here; the first token of the answer is {incoming.wait(timeout_s=60)}")


if __name__ == "__main__":
    {"prefill": prefill, "decode": decode}[sys.argv[1]](*sys.argv[2:])
