"""What ends a softmax, in both families."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.states import LN2


@gluon.jit
def lse_of_rows(m_i, l_i):
    """Return the natural-log lse of finished states, -inf where no key was seen.

    The fma is written out, as in `states.finish`. A compiler may fuse product and sum or not, as the code around them
    is, and the same rows would have other bits in another variant of a kernel.
    """
    empty = l_i == 0.0
    lse = gl.fma(m_i, gl.zeros_like(m_i) + LN2, gl.log(gl.where(empty, 1.0, l_i)))
    return gl.where(empty, float("-inf"), lse)
