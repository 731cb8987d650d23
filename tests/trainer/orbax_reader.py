"""A program that reads a checkpoint with stock orbax, in a process of its own, and prints what it finds."""

import json
import sys
import zlib

import numpy as np
import orbax.checkpoint as ocp

if __name__ == "__main__":
    tree = ocp.PyTreeCheckpointer().restore(sys.argv[1])
    a, b = tree["roles"]["a"], tree["roles"]["b"]
    flags, sizes = np.asarray(tree["flags"]).tolist(), list(tree["empty"].shape)
    results = [
        str(b.dtype),
        np.asarray(a).tolist(),
        np.asarray(b, np.float32).tolist(),
        tree["step"],
        tree["coefficient"],
    ]
    print(json.dumps([*results, flags, sizes, zlib.crc32(np.asarray(tree["roles"]["large"]).tobytes())]))
