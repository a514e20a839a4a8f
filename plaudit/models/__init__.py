"""Models on disk: resolve, check, load, save and import. Names are imported on first use: `catalog` needs no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plaudit.models.catalog import embedded_names as embedded_names
    from plaudit.models.catalog import resolve as resolve
    from plaudit.models.catalog import smollm2_gguf as smollm2_gguf
    from plaudit.models.chat.chat import has_chat_template as has_chat_template
    from plaudit.models.chat.chat import render_chat as render_chat
    from plaudit.models.chat.chat import render_chats as render_chats
    from plaudit.models.chat.chat import render_text as render_text
    from plaudit.models.fresh import new_llama as new_llama
    from plaudit.models.heads.value_head import ValueModel as ValueModel
    from plaudit.models.imported import import_gguf as import_gguf
    from plaudit.models.load import Kind as Kind
    from plaudit.models.load import Loaded as Loaded
    from plaudit.models.load import choose_device as choose_device
    from plaudit.models.load import load_any as load_any
    from plaudit.models.load import load_policy as load_policy
    from plaudit.models.load import load_reward as load_reward
    from plaudit.models.load import load_steps as load_steps
    from plaudit.models.load import load_value as load_value
    from plaudit.models.nemo.archive import import_nemo as import_nemo
    from plaudit.models.saving import save as save
    from plaudit.models.text import bos_ids as bos_ids
    from plaudit.models.text import encode as encode
    from plaudit.models.text import load_tokenizer as load_tokenizer

_HOMES = {
    "Kind": "load",
    "Loaded": "load",
    "ValueModel": "heads.value_head",
    "bos_ids": "text",
    "choose_device": "load",
    "embedded_names": "catalog",
    "encode": "text",
    "has_chat_template": "chat.chat",
    "import_gguf": "imported",
    "import_nemo": "nemo.archive",
    "load_any": "load",
    "load_policy": "load",
    "load_reward": "load",
    "load_steps": "load",
    "load_tokenizer": "text",
    "load_value": "load",
    "new_llama": "fresh",
    "render_chat": "chat.chat",
    "render_chats": "chat.chat",
    "render_text": "chat.chat",
    "resolve": "catalog",
    "save": "saving",
    "smollm2_gguf": "catalog",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
