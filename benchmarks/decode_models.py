"""Convert the checkpoint of `benchmarks/decode.py` to the formats of other engines, in the engine's own environment.

    PYTHON benchmarks/decode_models.py gguf MODEL OUT       # OUT-BF16.gguf, OUT-Q8_0.gguf, OUT-Q4_0.gguf
    PYTHON benchmarks/decode_models.py openvino MODEL OUT   # OUT-BF16, OUT-INT8, OUT-INT4

llama.cpp's quantizer writes the quantized GGUF files; it keeps the output layer of Q4_0 at Q6_K. optimum's export and
nncf write the OpenVINO models: INT8_SYM per channel, INT4_SYM in groups of 128 with embedding and output layer at INT8.
A file beside each model holds the bytes of its embedding, of which a decode step reads only one row per sequence.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """Return llama.cpp's name for a tensor of a Llama checkpoint."""
    module = name.removesuffix(".weight")
    if module in ENDS:
        return f"{ENDS[module]}.weight"
    layer, _, rest = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[rest]}.weight"


def make_gguf(model: Path, out: str) -> None:
    """Write the BF16 GGUF file (norms in float32), then quantize it with llama.cpp's quantizer."""
    import gguf
    import llama_cpp
    import numpy as np

    config = json.loads((model / "config.json").read_text())
    heads, hidden, vocab = config["num_attention_heads"], config["hidden_size"], config["vocab_size"]
    source = f"{out}-BF16.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("no_vocab")
    for shard in sorted(model.glob("*.safetensors")):
        data = np.memmap(shard, np.uint8, "r")
        (length,) = struct.unpack("<Q", data[:8].tobytes())
        for name, info in json.loads(data[8 : 8 + length].tobytes()).items():
            if name == "__metadata__":
                continue
            first, last = info["data_offsets"]
            bits = data[8 + length + first : 8 + length + last].view(np.uint16).reshape(info["shape"])
            if len(info["shape"]) == 1:
                writer.add_tensor(gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
            else:
                writer.add_tensor(gguf_name(name), bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for kind, bits_per_weight in (("BF16", 16), ("Q8_0", 8.5), ("Q4_0", 4.5)):
        if kind != "BF16":
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
            if llama_cpp.llama_model_quantize(source.encode(), f"{out}-{kind}.gguf".encode(), params):
                raise SystemExit(f"llama.cpp cannot quantize to {kind}")
        Path(f"{out}-{kind}.gguf.embedding").write_text(str(int(vocab * hidden * bits_per_weight / 8)))


def make_openvino(model: Path, out: str) -> None:
    """Export the model to OpenVINO and compress its weights."""
    import nncf
    import openvino

    exported = Path(f"{out}-BF16")
    command = ["-m", str(model), "--task", "text-generation-with-past", "--weight-format", "fp16", str(exported)]
    if not exported.exists():
        subprocess.run([Path(sys.executable).with_name("optimum-cli"), "export", "openvino", *command], check=True)
    config = json.loads((model / "config.json").read_text())
    embedding = config["hidden_size"] * config["vocab_size"]
    (exported / "embedding_bytes").write_text(str(2 * embedding))
    modes = {
        "INT8": {"mode": nncf.CompressWeightsMode.INT8_SYM},
        "INT4": {"mode": nncf.CompressWeightsMode.INT4_SYM, "group_size": 128, "ratio": 1.0},
    }
    for name, options in modes.items():
        folder = Path(f"{out}-{name}")
        folder.mkdir()
        network = nncf.compress_weights(openvino.Core().read_model(exported / "openvino_model.xml"), **options)
        openvino.save_model(network, folder / "openvino_model.xml", compress_to_fp16=False)
        for file in exported.iterdir():
            if not file.name.startswith("openvino_model") and file.name != "embedding_bytes":
                (folder / file.name).write_bytes(file.read_bytes())
        (folder / "embedding_bytes").write_text(str(embedding))


if __name__ == "__main__":
    {"gguf": make_gguf, "openvino": make_openvino}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
