"""Import this before a Triton kernel runs in the interpreter: Triton 3.6 reads loop bounds with int(one-element array),
which numpy 2.4 rejects."""

from typing import Any

import torch

if not torch.cuda.is_available():
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index
