"""A trained run on labelled data: metrics per level and class, confusions, calibration."""
