"""Settings of the tests of LUFFY."""

CLIP = ("method.clip_low=0.2", "method.clip_high=0.2")


MEAN = "method.aggregation=token-mean"
