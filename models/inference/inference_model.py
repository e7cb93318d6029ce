"""All that makes a model fast on the device and in the precision that it is in; README has the table."""

from models.inference.aot_compile import use_package
from models.inference.cpu_kernels import onednn_pays_off, use_onednn
from models.inference.fused_decode_step import use_joined
from models.inference.fused_vision import use_fused
from models.inference.quantization import use_int8
from models.vision_language_model import VisionLanguageModel


def make_fast(model: VisionLanguageModel, int8: bool = False, compile: bool | None = None) -> VisionLanguageModel:
    """Make a model that is to generate as fast as it can be. In place, once.

    int8 makes the language model's weights 8 bits long. compile=True compiles the decode step, None uses what was
    compiled, False does not: see `models.inference.aot_compile`. Raises RuntimeError if nothing can be compiled.
    """
    if int8:
        use_int8(model.decoder)
    if onednn_pays_off():
        use_onednn(model)
    use_fused(model)
    if compile is False or not use_package(model, build=bool(compile)):
        use_joined(model)
    return model
