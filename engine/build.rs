//! Tells the engine which GPUs its kernels are compiled for.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=CUDA_COMPUTE_CAP");
    #[cfg(feature = "cuda")]
    {
        // As the builds of candle and mistral.rs find it: CUDA_COMPUTE_CAP, or the GPU of this machine.
        let capability = cudaforge::detect_compute_cap().map_or(80, |found| found.base());
        println!("cargo::rustc-env=LASER_COMPUTE_CAPABILITY={capability}");
    }
}
