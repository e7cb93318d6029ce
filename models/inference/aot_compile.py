"""The decode step compiled ahead of time: a package per shape, precision and machine, without weights, kept in a cache.

Making one takes a minute or two and a C++ compiler; loading it takes a tenth of a second. A model that uses it decodes
single sequences by it, and does everything else as before.
"""

import hashlib
import os
import platform
import warnings
from pathlib import Path

import torch
from torch import Tensor

from models import language_model
from models.inference import decode_step
from models.inference.cpu_kernels import cpu_info
from models.inference.decode_step import DecodeStep
from models.inference.fused_decode_step import Step, use_step
from models.language_model import LanguageModel
from models.vision_language_model import VisionLanguageModel


def package_path(decoder: LanguageModel) -> Path:
    """Where the package for a decoder of this shape and precision belongs, on this machine, with this version of torch.

    The folder is $NANOVLM_CACHE, or nanovlm in $XDG_CACHE_HOME or ~/.cache. The name is a digest of all that compiled
    code depends on; weights are not among it.
    """
    shape = {name: value for name, value in decoder.cfg.to_dict().items() if name.startswith("lm_")}
    state = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in decoder.state_dict().items()]
    sources = [Path(module.__file__).read_text("utf-8") for module in (decode_step, language_model)]
    threads = torch.get_num_threads()
    told = (torch.__version__, platform.platform(), cpu_info("flags"), threads, sorted(shape.items()), state, sources)
    folder = os.environ.get("NANOVLM_CACHE")
    folder = Path(folder or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "nanovlm"))
    return folder / f"decode-{hashlib.sha256(repr(told).encode()).hexdigest()[:16]}.pt2"


@torch.no_grad()
def build_package(decoder: LanguageModel, path: Path) -> None:
    """Compile decoder's step into path, whole or not at all. Raises RuntimeError without a C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.export import Dim, export

    try:
        get_cpp_compiler()
    except RuntimeError:
        raise RuntimeError("compiling needs a C++ compiler, and there is none: install g++, or go without") from None
    cfg, like = decoder.cfg, decoder.norm.weight
    cache = [[like.new_zeros(1, cfg.lm_n_kv_heads, 64, cfg.lm_head_dim) for _ in decoder.blocks] for _ in range(2)]
    capacity = [{2: Dim("capacity", min=2)}] * len(decoder.blocks)
    inputs = (torch.tensor([0]), torch.tensor([3]), *cache)
    program = export(DecodeStep(decoder).eval(), inputs, dynamic_shapes=(None, None, capacity, capacity))
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(new), inductor_configs={"aot_inductor.package_constants_in_so": False}
        )
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def load_package(decoder: LanguageModel, path: Path) -> Step:
    """The step in path as a function, reading decoder's weights where they are. Raises RuntimeError if it is none."""
    # what torch._inductor.aoti_load_package comes to, without its import of the compiler, which takes two seconds
    package = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
    weights = DecodeStep(decoder).state_dict()
    weights = {name: weights[name] for name in package.get_constant_fqns()}
    package.load_constants(weights, False, True, True)  # all of them, and the caller keeps them

    def run(ids: Tensor, position: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        return package.boxed_run([ids, position, *keys, *values])[0]

    run.weights = weights  # which the package only points at
    return run


def use_package(model: VisionLanguageModel, build: bool = False) -> bool:
    """Let model decode by a package, if it is in the cache or, with build, after making it; True if it does.

    On other devices than the CPU, build compiles the step in this process, and there are no packages. A package that
    cannot be loaded is made again, or passed over with a warning.
    """
    decoder = model.decoder
    if decoder.norm.weight.device.type != "cpu":
        if build:
            use_step(model, torch.compile(DecodeStep(decoder), mode="reduce-overhead"))
        return build
    path = package_path(decoder)
    if os.access(path, os.R_OK):
        try:
            use_step(model, load_package(decoder, path))
            return True
        except RuntimeError as error:
            if not build:
                warnings.warn(
                    f"{path} is no package ({str(error).splitlines()[0]}) and not used; delete it", stacklevel=2
                )
    if build:
        build_package(decoder, path)
        use_step(model, load_package(decoder, path))
    return build
