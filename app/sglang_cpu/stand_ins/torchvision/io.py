"""Stand-in for the names that transformers/image_utils.py imports."""

ImageReadMode = decode_image = None
