"""Classes of images by a trained run: `linnaeus predict`."""
