"""The Hopper kernel, in Gluon: prompts, with TMA and warpgroup products (wgmma).

Gluon is imported when a Hopper plan is made, not by `import quire`.
"""
