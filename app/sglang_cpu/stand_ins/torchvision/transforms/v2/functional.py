"""Stand-in for the module that transformers' image processing imports."""

from torchvision.transforms import InterpolationMode as InterpolationMode
