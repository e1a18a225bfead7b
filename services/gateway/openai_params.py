"""Names of request parameters: those read, and those known elsewhere and not built here."""

from __future__ import annotations

from collections.abc import Mapping

# Read by both endpoints. The second half are extensions common among open servers.
_SHARED_NAMES = """
    model stream stream_options max_tokens temperature top_p n stop seed presence_penalty
    frequency_penalty user metadata store service_tier safety_identifier prompt_cache_key
    top_k min_p repetition_penalty min_tokens ignore_eos stop_token_ids
"""
_SHARED = frozenset(_SHARED_NAMES.split())

CHAT = _SHARED | {"messages", "max_completion_tokens", "logprobs", "top_logprobs"}
COMPLETION = _SHARED | {"prompt", "logprobs", "echo", "best_of"}
TOKENIZE = frozenset({"model", "prompt", "messages", "add_special_tokens"})
DETOKENIZE = frozenset({"model", "tokens"})

# Accepted because they change nothing about the answer.
UNUSED_TEXTS = ("user", "safety_identifier", "prompt_cache_key")
UNUSED = frozenset({*UNUSED_TEXTS, "metadata"})

# Accepted at the values that change nothing; any other value is refused.
LIMITED: Mapping[str, str] = {
    "best_of": "unless it equals n",
    "echo": "unless it is false",
    "service_tier": 'unless it is "auto" or "default"',
    "store": "unless it is false",
    "stream_options.include_obfuscation": "unless it is false",
}

# Known from OpenAI or from other servers, and changing the answer: refused, never ignored.
# Names of one endpoint are here too, for when they are sent to the other.
_UNSUPPORTED_NAMES = """
    tools tool_choice parallel_tool_calls functions function_call response_format logit_bias
    audio modalities prediction reasoning_effort reasoning verbosity web_search_options suffix
    moderation prompt_cache_retention prompt_cache_options text include instructions input
    previous_response_id max_output_tokens
    top_a typical_p tfs mirostat dry_multiplier xtc_probability
    prompt_logprobs use_beam_search length_penalty early_stopping bad_words allowed_token_ids
    include_stop_str_in_output skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens add_generation_prompt continue_final_message add_special_tokens
    documents chat_template chat_template_kwargs mm_processor_kwargs
    guided_json guided_regex guided_choice guided_grammar structured_outputs regex json_schema
    ebnf grammar lora lora_path adapter logits_processors prompt_embeds image_data cache_salt
    kv_transfer_params vllm_xargs return_token_ids return_tokens_as_token_ids priority
    best_of echo messages prompt max_completion_tokens top_logprobs
"""
UNSUPPORTED = frozenset(_UNSUPPORTED_NAMES.split())

# The template never sees a role it was not asked about by this list.
ROLES = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name of the same thing
    "user": "user",
    "assistant": "assistant",
}
UNBUILT_ROLES = ("tool", "function")
UNBUILT_MESSAGE_FIELDS = ("tool_calls", "tool_call_id", "function_call", "audio", "refusal")
