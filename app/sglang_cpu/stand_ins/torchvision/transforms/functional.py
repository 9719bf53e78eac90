"""Stand-in for the names that SGLang and transformers import from here."""

from torchvision.transforms import InterpolationMode as InterpolationMode

pil_to_tensor = None
