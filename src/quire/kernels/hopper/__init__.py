"""The Hopper kernel, in Gluon: prompts on GPUs with TMA and warpgroup products. Gluon is imported when a plan has such a launch."""
