"""Stand-in: SGLang and transformers import torchvision at module level for image models.

We serve text models only, so every name here exists to be imported and none is ever called.
"""

__version__ = "0.28.0"
