"""Small files as those of Fashion-MNIST."""

import gzip

import numpy as np


def write_idx(path, values):
    array = np.asarray(values, np.uint8)
    header = bytes([0, 0, 8, array.ndim]) + np.asarray(array.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(header + array.tobytes()))


def write_fashion_mnist(folder, num_train, num_test):
    """Write the four files. The pixels of an image are its number, its label is the last digit."""
    for split, numbers in (("train", np.arange(num_train)), ("t10k", np.arange(num_test))):
        write_idx(
            folder / f"{split}-images-idx3-ubyte.gz", numbers[:, None, None] + np.zeros((28, 28))
        )
        write_idx(folder / f"{split}-labels-idx1-ubyte.gz", numbers % 10)
