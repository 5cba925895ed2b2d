"""The commands `bench` and `tune` of `quire`, which finds them by their modules' names."""
