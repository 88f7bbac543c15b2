"""vLLM plugin: `--load-format dummy` fills weights whose values behave like a real checkpoint's, so that power does too.

vLLM's own dummy weights are tiny and nearly constant, and a GPU multiplies near-zeros for less energy than real numbers. Here 8-bit floats
spread over their range, scales bring products back to the size of a trained layer, and norms are one. Text is noise; time and energy are those
of the architecture. Loaded by vLLM through the entry point beside this file when servers/vllm_plugins is on PYTHONPATH (LOAD_FORMAT=random).
"""

FP8_SPREAD = 60.0  # standard deviation in units of an e4m3 value, whose largest is 448
FP8_LIMIT = 440.0
WEIGHT_SPREAD = 0.02  # what trained transformers have, and what the scales reproduce for fp8
ROWS_AT_ONCE = 1 << 16  # bounds the temporary memory of the random numbers


def fill(model, *_, **__):
    """Fill every parameter of a module in place (arguments beyond the module are those of vLLM's own function, unused)."""
    import torch

    values = 0
    for name, parameter in model.state_dict().items():
        if not torch.is_tensor(parameter):
            continue
        data = parameter.data
        if data.dtype == torch.float8_e4m3fn:
            for rows in data.view(-1, data.shape[-1]).split(ROWS_AT_ONCE):
                random = torch.randn(rows.shape, device=data.device, dtype=torch.bfloat16)
                rows.copy_((random * FP8_SPREAD).clamp_(-FP8_LIMIT, FP8_LIMIT).to(data.dtype))
        elif not torch.is_floating_point(data):
            continue
        elif "scale" in name:
            data.fill_(WEIGHT_SPREAD / FP8_SPREAD)
        elif "norm" in name:
            data.fill_(1.0)
        elif data.element_size() >= 2 and "cache" not in name and "inv_freq" not in name:
            data.normal_(0, WEIGHT_SPREAD)
        values += data.numel()
    print(f"random weights: {values / 1e9:.2f}e9 values filled", flush=True)


def register():
    """Entry point of the plugin group vllm.general_plugins: replace vLLM's filler in both places that hold it."""
    from vllm.model_executor.model_loader import dummy_loader, weight_utils

    weight_utils.initialize_dummy_weights = fill
    dummy_loader.initialize_dummy_weights = fill
