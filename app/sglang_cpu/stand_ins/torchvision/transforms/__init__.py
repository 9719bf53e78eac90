"""Stand-in for what sglang/srt/configs/deepseek_ocr.py and transformers import at module level."""

from enum import Enum


class InterpolationMode(Enum):
    """The members that transformers maps to Pillow's."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
