//! The instruction set of this x86-64 processor.

use std::sync::OnceLock;

/// An instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Isa {
    Avx512,
    Avx2,
    /// Arrays that the compiler vectorises, for processors without AVX2.
    Portable,
}

/// The best that this processor has.
pub(super) fn isa() -> Isa {
    static ISA: OnceLock<Isa> = OnceLock::new();
    *ISA.get_or_init(|| {
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
        {
            return Isa::Avx512;
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return Isa::Avx2;
        }
        Isa::Portable
    })
}

/// Runs `work`, compiled for the processor's instruction set as far as it is inlined.
#[inline(always)]
pub(crate) fn vectorized<R>(work: impl FnOnce() -> R) -> R {
    match isa() {
        // SAFETY: detected.
        Isa::Avx512 => unsafe { with_avx512(work) },
        // SAFETY: detected.
        Isa::Avx2 => unsafe { with_avx2(work) },
        Isa::Portable => work(),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
unsafe fn with_avx512<R>(work: impl FnOnce() -> R) -> R {
    work()
}

#[target_feature(enable = "avx2,fma")]
unsafe fn with_avx2<R>(work: impl FnOnce() -> R) -> R {
    work()
}
