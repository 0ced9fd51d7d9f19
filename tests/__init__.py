"""The tests, as a package: folders may hold files of the same name."""
