//! The architectures the tree engine implements.

/// One decoder layout with these differences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Architecture {
    /// Also Vicuna and every other fine-tune of Llama 1 to 3.
    Llama,
    /// Llama with an optional sliding window.
    Mistral,
    /// Llama with a bias on q, k and v; also Qwen2.5.
    Qwen2,
    /// Llama with a norm on every head of q and k.
    Qwen3,
}

impl Architecture {
    const ALL: [(Self, &'static str, &'static str); 4] = [
        (Self::Llama, "LlamaForCausalLM", "llama"),
        (Self::Mistral, "MistralForCausalLM", "mistral"),
        (Self::Qwen2, "Qwen2ForCausalLM", "qwen2"),
        (Self::Qwen3, "Qwen3ForCausalLM", "qwen3"),
    ];

    /// By class name (`architectures` of config.json) or model type (config.json, GGUF).
    pub(super) fn parse(name: &str) -> Option<Self> {
        Self::ALL
            .iter()
            .find(|(_, class, model_type)| *class == name || *model_type == name)
            .map(|(architecture, ..)| *architecture)
    }

    /// The class names, for messages.
    pub(super) fn supported() -> String {
        Self::ALL.map(|(_, class, _)| class).join(", ")
    }
}
