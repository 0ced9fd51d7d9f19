"""Memory, batch size and speed before a long run: the same as `linnaeus analyze`.

python tools/analyze_batch_sizes.py --cfg my_exp.yaml --fractions 0.6,0.8 --modes train,val
"""

from linnaeus.main import console

if __name__ == "__main__":
    raise SystemExit(console("analyze"))
