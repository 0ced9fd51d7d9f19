"""A trained run on labelled data: figures per taxonomic rank and class, confusions, calibration."""
