"""The config.json of published policies, as far as their sizes are concerned."""

POLICY_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "tie_word_embeddings": False,
}

LARGE = {  # the sizes in their model cards' config.json, and their parameters
    "32B": (
        POLICY_8B
        | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
        32.8e9,
    ),
    "70B": (
        {
            "model_type": "llama",
            "hidden_size": 8192,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "tie_word_embeddings": False,
        },
        70.6e9,
    ),
    "235B": (
        POLICY_8B
        | {
            "model_type": "qwen3_moe",
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536,
        },
        235.1e9,
    ),
}
