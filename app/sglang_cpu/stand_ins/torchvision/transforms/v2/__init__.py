"""Stand-in package of `torchvision.transforms.v2.functional`."""
