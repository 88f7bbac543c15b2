"""A logits processor for vLLM that makes the server emit a given reply, token by token, at the cost of a normal decode.

    PYTHONPATH=/path/to/trajoule vllm serve MODEL --logits-processors servers.force_reply:ForceReply ...

A request asks for it with the token ids of the reply, comma separated, in its body:

    {"model": "m", "messages": [...], "max_tokens": 4, "vllm_xargs": {"forced_reply": "19556,28,905"}}

After the last id only tokens that end a reply are allowed, of which the model takes the likelier one: the reply ends as a live one does,
and `max_tokens` must leave room for that one token. Requests without `forced_reply` are untouched. Each step sets one row of the logits
to -inf but for one entry (two small kernels); sampling, temperature included, then has one choice. vLLM takes no logits processors
together with speculative decoding.
"""

try:
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
except ImportError:  # the rule below is tested without vLLM
    AdapterLogitsProcessor = object

ARGUMENT = "forced_reply"


def parse_ids(value):
    """Token ids of the argument. Raises ValueError, which vLLM answers with 400."""
    try:
        ids = [int(x) for x in value.split(",")] if isinstance(value, str) else [int(x) for x in value]
    except (TypeError, ValueError) as e:
        raise ValueError(f"vllm_xargs.{ARGUMENT}: found {str(value)[:80]!r}, expected token ids such as '1,2,3'") from e
    if not ids or min(ids) < 0:
        raise ValueError(f"vllm_xargs.{ARGUMENT}: found {str(value)[:80]!r}, expected at least one id, none negative")
    return ids


class Forced:
    """Rule for one request: at output position i only ids[i] is possible, behind them only what ends a reply."""

    def __init__(self, ids, end_ids):
        self.ids = ids
        self.end_ids = sorted(end_ids)

    def __call__(self, output_ids, logits):
        # The position comes from the number of tokens there are, not from the number of calls: a partly prefilled or preempted
        # request is asked more than once for one position.
        position = len(output_ids)
        if position < len(self.ids) and self.ids[position] >= logits.shape[-1]:
            return logits  # an id beyond the vocabulary would end the whole server; the proxy notices that the reply is another
        if position < len(self.ids):
            logits.fill_(float("-inf"))
            logits[self.ids[position]] = 0.0
        elif self.end_ids:
            kept = logits[self.end_ids].clone()
            logits.fill_(float("-inf"))
            logits[self.end_ids] = kept
        return logits


class ForceReply(AdapterLogitsProcessor):
    """For --logits-processors; see the top of the file."""

    @classmethod
    def validate_params(cls, sampling_params):
        value = (sampling_params.extra_args or {}).get(ARGUMENT)
        if value is not None:
            parse_ids(value)

    def is_argmax_invariant(self):
        """False: vLLM may then not skip it for greedy requests."""
        return False

    def new_req_logits_processor(self, params):
        value = (params.extra_args or {}).get(ARGUMENT)
        return None if value is None else Forced(parse_ids(value), params.all_stop_token_ids)
