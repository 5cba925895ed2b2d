"""Multi-head latent attention (MLA): one portable kernel for decode, drafts and prompts over cached latents."""
