"""A trained run on labeled data: metrics per level and class, confusions, calibration."""
