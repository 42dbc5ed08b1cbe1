//! Tells the engine which GPUs its kernels are compiled for, and compiles its own.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=CUDA_COMPUTE_CAP");
    #[cfg(feature = "cuda")]
    {
        // As the builds of candle and mistral.rs find it: CUDA_COMPUTE_CAP, or the GPU of this machine.
        let capability = cudaforge::detect_compute_cap().map_or(80, |found| found.base());
        println!("cargo::rustc-env=LASER_COMPUTE_CAPABILITY={capability}");
        compile("cuda");
    }
}

/// PTX for 8.0, which later GPUs compile for themselves.
#[cfg(feature = "cuda")]
fn compile(folder: &str) {
    println!("cargo::rerun-if-changed={folder}");
    let to = std::path::Path::new(&std::env::var_os("OUT_DIR").expect("cargo sets it")).join("kernels.ptx");
    let source = format!("{folder}/kernels.cu");
    let arguments = ["-std=c++17", "-arch=compute_80", "-ptx", &source, "-o"];
    let done = std::process::Command::new("nvcc").args(arguments).arg(to).status();
    assert!(done.is_ok_and(|status| status.success()), "nvcc does not compile {source}; is it in PATH?");
}
