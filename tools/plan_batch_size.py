"""Which batch size is worth its time, before a long run: the same as `linnaeus plan`.

python tools/plan_batch_size.py --cfg my_exp.yaml --epochs 90 --time-budget 12h
"""

from linnaeus.main import console

if __name__ == "__main__":
    raise SystemExit(console("plan"))
