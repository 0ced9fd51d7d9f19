"""A trained run on labelled data: figures per level and class, confusions, calibration."""
