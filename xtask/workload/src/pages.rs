//! Prompts and their KV pages. Pure.

/// What prompts are made of. An observer must never write a byte of it anywhere.
pub(crate) const PROMPT: &str = "confidential-prompt-text ";

/// A prompt of about as many tokens as it has pages.
pub(crate) fn text(pages: u32) -> String {
    let length = pages as usize * 4;
    PROMPT.chars().cycle().take(length).collect()
}

/// Pages of a prompt.
pub(crate) fn of_text(text: &str) -> u32 {
    u32::try_from(text.len() / 4).unwrap_or(u32::MAX).max(1)
}
