"""Attention's cache: the keys and values of all tokens so far. Appending a token rarely copies them."""

import torch
from torch.utils.weak import WeakIdKeyDictionary

# For keys that `append_to_cache` returned: (key buffer, value buffer, the values returned with these keys)
ROOMS = WeakIdKeyDictionary()


def append_to_cache(cache, k, v):
    """Append k and v (B, H, T, n) to a (keys, values) cache. The cache passed in is not modified.

    The buffers have room at the end, so a new token does not copy the whole cache. When the room is used up, they grow
    by a quarter. Only the first caller that continues exactly the returned tensors gets the room. Any other
    continuation, or a cache that was cut, sorted, expanded, moved or loaded, starts with a copy. With gradients, or
    when compiling, this is torch.cat.
    """
    past_k, past_v = cache
    past = past_k.shape[2]
    T = past + k.shape[2]
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.cat([past_k.to(k.dtype), k], 2), torch.cat([past_v.to(v.dtype), v], 2)
    room_k, room_v, values = ROOMS.pop(past_k, (None, None, None))  # only one of two threads gets it
    if values is not past_v or not has_room(room_k, k, T):
        room_k = k.new_empty(*k.shape[:2], T + max(32, T // 4), k.shape[3])
        room_v = v.new_empty(*v.shape[:2], T + max(32, T // 4), v.shape[3])
        room_k[:, :, :past] = past_k
        room_v[:, :, :past] = past_v
    room_k[:, :, past:T] = k
    room_v[:, :, past:T] = v
    keys, values = room_k[:, :, :T], room_v[:, :, :T]
    ROOMS[keys] = room_k, room_v, values
    return keys, values


def has_room(room, k, T):
    """True if the buffer has room for T tokens, has k's dtype and fits the current inference mode."""
    alike = room.dtype == k.dtype and room.is_inference() == torch.is_inference_mode_enabled()
    return alike and T <= room.shape[2]
