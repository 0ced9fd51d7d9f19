"""Memory, batch size and speed before a long run: the same as `linnaeus analyze`.

python tools/analyze_batch_sizes.py --cfg my_exp.yaml --fractions 0.6,0.8 --modes train,val
"""

import sys

from linnaeus.main import cli

if __name__ == "__main__":
    raise SystemExit(cli(["analyze", *sys.argv[1:]]))
