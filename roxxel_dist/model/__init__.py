"""The built-in Transformer, its loss, and text from it.

Names of arrays end in the letters of their dimensions, `x_BxLxD` for [B, L, D]:

    B rows                      H query heads                       E experts
    L tokens of a row           G key and value heads               N rows of tokens that experts see, B x L
    D dim, the residual stream  R queries a key head, H / G         A assignments of a row to an expert
    V vocabulary                S slots of a cache; in qkv, R + 2   F the width inside a feed-forward layer
    C a chunk; of mla a latent  K the size of a head                P first matrices: 2, gate and up, or 1

In `moe.py` K is experts a row.
"""
