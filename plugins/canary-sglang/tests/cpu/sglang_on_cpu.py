"""Lets an unmodified SGLang import on a machine without CUDA; loaded at start-up through a .pth file by `setup.sh`.

torchvision's wheel is a CUDA build, whose operators can't load beside a CPU torch; `import torchvision` only needs two
of them to be declared. vLLM's ``_custom_ops`` is imported by SGLang's rotary embedding and never called on a CPU.
"""

import importlib.machinery
import sys
import types


class _Finder:
    def __init__(self):
        self._library = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and self._library is None:
            import torch

            if not hasattr(torch.ops.torchvision, "nms"):
                self._library = torch.library.Library("torchvision", "FRAGMENT")
                self._library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                self._library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        if name in ("vllm", "vllm._custom_ops"):
            return importlib.machinery.ModuleSpec(name, self, is_package=name == "vllm")
        return None

    def create_module(self, spec):
        return types.ModuleType(spec.name)

    def exec_module(self, module):
        if module.__name__ == "vllm._custom_ops":
            module.rotary_embedding = _never_called


def _never_called(*args, **kwargs):
    raise NotImplementedError("vLLM's kernels are not installed; SGLang only imports this name on a CPU")


sys.meta_path.insert(0, _Finder())
