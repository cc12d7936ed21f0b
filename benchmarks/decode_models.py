"""Convert the checkpoint of `benchmarks/decode.py` to the formats of other engines, in the engine's own environment.

    PYTHON benchmarks/decode_models.py gguf MODEL OUT       # OUT-BF16.gguf and the same of Q8_0, Q4_0, MXFP4
    PYTHON benchmarks/decode_models.py openvino MODEL OUT   # OUT-BF16, OUT-INT8, OUT-INT4
    PYTHON benchmarks/decode_models.py int8 MODEL OUT       # OUT-W8A8, which vLLM with zentorch reads

llama.cpp's quantizer writes the files of Q8_0 and Q4_0; it keeps the output layer of Q4_0 at Q6_K. It quantizes only
experts to MXFP4, so gguf's own quantizer writes that file, with the embedding and the output layer of the Q4_0 file.
optimum's export and nncf write the OpenVINO models: INT8_SYM per channel, INT4_SYM in groups of 128 with embedding and
output layer at INT8. W8A8 has int8 weights per channel and inputs rounded to int8 per token, in llm-compressor's names,
with a BF16 output layer. A file beside each GGUF and OpenVINO model holds the bytes of its embedding, of which a decode
step reads only one row per sequence.
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
#: The GGUF files and the bits of a weight of their embedding.
GGUF_BITS = {"BF16": 16, "Q8_0": 8.5, "Q4_0": 4.5, "MXFP4": 4.5}


def gguf_name(name: str) -> str:
    """Return llama.cpp's name for a tensor of a Llama checkpoint."""
    module = name.removesuffix(".weight")
    if module in ENDS:
        return f"{ENDS[module]}.weight"
    layer, _, rest = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[rest]}.weight"


def tensors(model: Path) -> Iterator[tuple[str, Any]]:
    """Yield the names of a BF16 checkpoint's tensors and their bits, as uint16 arrays."""
    import numpy as np

    for shard in sorted(model.glob("*.safetensors")):
        data = np.memmap(shard, np.uint8, "r")
        (length,) = struct.unpack("<Q", data[:8].tobytes())
        for name, info in json.loads(data[8 : 8 + length].tobytes()).items():
            if name != "__metadata__":
                first, last = info["data_offsets"]
                yield name, data[8 + length + first : 8 + length + last].view(np.uint16).reshape(info["shape"])


def new_gguf(path: str, config: dict[str, Any]) -> Any:
    """Return a writer of a GGUF file, with the hyperparameters of a Llama model."""
    import gguf

    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    return writer


def finish_gguf(writer: Any) -> None:
    """Write the file of a GGUF writer."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_gguf(model: Path, out: str) -> None:
    """Write the BF16 GGUF file (norms in float32), and quantize it."""
    import gguf
    import llama_cpp
    import numpy as np

    config = json.loads((model / "config.json").read_text())
    source = f"{out}-BF16.gguf"
    writer = new_gguf(source, config)
    for name, bits in tensors(model):
        if bits.ndim == 1:
            writer.add_tensor(gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(gguf_name(name), bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    finish_gguf(writer)
    for kind in ("Q8_0", "Q4_0"):
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
        if llama_cpp.llama_model_quantize(source.encode(), f"{out}-{kind}.gguf".encode(), params):
            raise SystemExit(f"llama.cpp cannot quantize to {kind}")
    make_mxfp4(model, out, config)
    for kind, bits in GGUF_BITS.items():
        nbytes = int(config["vocab_size"] * config["hidden_size"] * bits / 8)
        Path(f"{out}-{kind}.gguf.embedding").write_text(str(nbytes))


def make_mxfp4(model: Path, out: str, config: dict[str, Any]) -> None:
    """Write the MXFP4 GGUF file; embedding and output layer are those of the Q4_0 file."""
    import gguf
    import numpy as np

    mxfp4 = gguf.GGMLQuantizationType.MXFP4
    ends = {tensor.name: tensor for tensor in gguf.GGUFReader(f"{out}-Q4_0.gguf").tensors}
    writer = new_gguf(f"{out}-MXFP4.gguf", config)
    for original, bits in tensors(model):
        name = gguf_name(original)
        values = (bits.astype(np.uint32) << 16).view(np.float32)
        if bits.ndim == 1:
            writer.add_tensor(name, values)
        elif name in ("token_embd.weight", "output.weight"):
            writer.add_tensor(name, ends[name].data, raw_dtype=ends[name].tensor_type)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, mxfp4), raw_dtype=mxfp4)
    finish_gguf(writer)


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


def make_int8(model: Path, out: str) -> None:
    """Round the weights of all linears but the output layer to int8, one scale per row."""
    import numpy as np
    import torch
    from safetensors.torch import save_file

    folder = Path(f"{out}-W8A8")
    folder.mkdir()
    written: dict[str, torch.Tensor] = {}
    for name, bits in tensors(model):
        tensor = torch.from_numpy(np.array(bits).view(np.int16)).view(torch.bfloat16)
        if tensor.dim() == 1 or name.removesuffix(".weight") in ENDS:
            written[name] = tensor
        else:
            scale = (tensor.float().abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
            written[f"{name}_scale"] = scale
            written[name] = (tensor.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
    save_file(written, folder / "model.safetensors", {"format": "pt"})
    ints = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": ints | {"strategy": "channel", "dynamic": False},
        "input_activations": ints | {"strategy": "token", "dynamic": True},
    }
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for file in model.glob("tokenizer*"):
        shutil.copy(file, folder)


if __name__ == "__main__":
    {"gguf": make_gguf, "openvino": make_openvino, "int8": make_int8}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
