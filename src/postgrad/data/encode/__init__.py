"""Problems become token ids: chat templates, prompt styles, limits, and the mask of SFT."""
