//! The instruction set of this x86-64 processor.

use std::sync::OnceLock;

/// An instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Isa {
    Avx512,
    Avx2,
    /// Arrays that the compiler vectorises, for processors without AVX2.
    Portable,
}

/// The best that this processor has.
pub(crate) fn isa() -> Isa {
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

/// Defines functions that are compiled for the processor's instruction set: `fn NAME = BODY(ARGUMENTS) -> OUTPUT;`, the
/// generics of both in brackets. The body has to be `#[inline(always)]`, and so has what it calls.
///
/// This is a macro because the compiler inlines a closure, or a function that is passed as an argument, only if it is
/// short; otherwise it compiles it once, for any x86-64 processor. That way softmax, SiLU and quantisation had four
/// lanes instead of sixteen.
macro_rules! vectorized {
    ($($(#[$attribute:meta])* $visibility:vis fn $name:ident $([$($generics:tt)*][$($names:tt)*])? =
        $body:ident($($argument:ident: $kind:ty),*) $(-> $output:ty)?;)*) => { $(
        $(#[$attribute])*
        $visibility fn $name $(<$($generics)*>)? ($($argument: $kind),*) $(-> $output)? {
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
            fn avx512 $(<$($generics)*>)? ($($argument: $kind),*) $(-> $output)? {
                $body $(::<$($names)*>)? ($($argument),*)
            }
            #[target_feature(enable = "avx2,fma")]
            fn avx2 $(<$($generics)*>)? ($($argument: $kind),*) $(-> $output)? {
                $body $(::<$($names)*>)? ($($argument),*)
            }
            use $crate::skinny::{Isa, isa};
            #[allow(unsafe_code, reason = "the functions are safe on a processor with their instruction set")]
            match isa() {
                // SAFETY: detected.
                Isa::Avx512 => unsafe { avx512 $(::<$($names)*>)? ($($argument),*) },
                // SAFETY: detected.
                Isa::Avx2 => unsafe { avx2 $(::<$($names)*>)? ($($argument),*) },
                Isa::Portable => $body $(::<$($names)*>)? ($($argument),*),
            }
        }
    )* };
}
pub(crate) use vectorized;
