import sys

import numpy as np

import pdlink

LAYERS, TOKENS = 4, 512
PROMPT, BLOCKS = list(range(TOKENS)), list(range(40, 72))
LAYOUT = pdlink.paged_layout(
    dtype="float32", itemsize=4, num_layers=LAYERS, num_blocks=128, block_tokens=16, num_heads=8, head_dim=64
)
KV = np.random.default_rng(7).standard_normal((LAYERS, 2, 32, 16, 8, 64), np.float32)  # what a forward pass computes


def main(verb, directory):
    pages = np.zeros((LAYERS, 2, 128, 16, 8, 64), np.float32)  # the engine's KV cache
    with pdlink.Cache(
        LAYOUT, [pages], nbytes=64 << 20, disk=directory, disk_nbytes=1 << 30, model="example"
    ) as cache:
        if verb == "store":
            pages[:, :, BLOCKS] = KV
            print(f"{cache.store(PROMPT, BLOCKS)} tokens are kept")
        else:
            found = cache.retrieve(PROMPT, BLOCKS[::-1])
            assert found == 0 or np.array_equal(pages[:, :, BLOCKS[::-1]], KV)
            print(f"{found} of {TOKENS} tokens are here")


if __name__ == "__main__":
    main(*sys.argv[1:])
