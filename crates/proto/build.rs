//! Compiles `proto/csi.proto` with protox (pure Rust: no `protoc` on the machine) into the message
//! types, clients and servers, and keeps the descriptor for the contract test.
#![allow(clippy::disallowed_methods)]

use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto/csi.proto");
    let mut compiler = protox::Compiler::new(["proto"])?;
    compiler.include_imports(true).open_file("csi.proto")?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    // Encoded by the compiler itself: the typed set would drop the custom options (csi_secret).
    std::fs::write(out.join("csi.bin"), compiler.encode_file_descriptor_set())?;
    tonic_prost_build::configure().compile_fds(compiler.file_descriptor_set())?;
    Ok(())
}
