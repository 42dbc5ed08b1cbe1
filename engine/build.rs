//! Tells the engine which GPUs its kernels are compiled for, and compiles its own.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=CUDA_COMPUTE_CAP");
    #[cfg(feature = "cuda")]
    {
        // As the builds of candle and mistral.rs find it: CUDA_COMPUTE_CAP, or the GPU of this machine.
        let capability = cudaforge::detect_compute_cap().map_or(80, |found| found.base());
        println!("cargo::rustc-env=LASER_COMPUTE_CAPABILITY={capability}");
        compile("cuda", capability);
    }
}

/// Machine code for that capability, and PTX for 8.0, which tests read. From PTX alone a GPU would compile all kernels
/// at each start that has no cache, which takes seconds.
#[cfg(feature = "cuda")]
fn compile(folder: &str, capability: usize) {
    println!("cargo::rerun-if-changed={folder}");
    assert!(capability >= 80, "CUDA_COMPUTE_CAP={capability}: kernels need tensor cores of 8.0 or later");
    let to = std::path::Path::new(&std::env::var_os("OUT_DIR").expect("cargo sets it")).join("kernels.fatbin");
    let source = format!("{folder}/kernels.cu");
    let code = format!("-gencode=arch=compute_{capability},code=sm_{capability}");
    let done = std::process::Command::new("nvcc")
        .args(["-std=c++17", "-fatbin", "--no-compress", "-gencode=arch=compute_80,code=compute_80", &code])
        .args([&source, "-o"])
        .arg(to)
        .status();
    assert!(done.is_ok_and(|status| status.success()), "nvcc does not compile {source}; is it in PATH?");
}
