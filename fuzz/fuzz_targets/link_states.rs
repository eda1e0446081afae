#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    vccl::fuzzing::link_states(bytes);
});
