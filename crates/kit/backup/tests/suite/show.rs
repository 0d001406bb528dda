//! What `show` draws.

use files::pattern::Image;

use crate::driver::Driver;
use crate::tool::{MIB, Place, arg, text};

#[test]
fn maps_show_data_and_changes_where_they_are() {
    let place = Place::new();
    let driver = Driver::start(&place.path("csi.sock"));
    let (size, endpoint) = (512 * MIB, driver.endpoint());
    let file = place.open_image(size);
    let mut image = Image::default();
    let path = place.image();
    let back_up = |handle: &str| {
        place.ok(&[
            "auto",
            "--volume",
            "v",
            "--device",
            arg(&path),
            "--endpoint",
            &endpoint,
            "--snapshot",
            handle,
        ])
    };
    // The first eighth: a line of the map is 64 MiB.
    image.write(&file, 0, 64 * 256, 1).expect("write");
    driver.snapshot("one", &image, size);
    back_up("one");
    image.write(&file, 32 * 256, 1, 2).expect("write");
    image.punch(&file, 256, 256).expect("punch");
    image.write(&file, 300 * 256, 256, 3).expect("write");
    driver.snapshot("two", &image, size);
    back_up("two");

    let drawn = |arguments: &[&str]| -> Vec<String> {
        let output = place.run(arguments);
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout).lines().map(str::to_owned).collect()
    };
    let line = |lines: &[String], number: usize| lines[3 + number].trim_start().to_owned();
    let full = place.list()[0].clone();
    let lines = drawn(&["show", &full]);
    assert_eq!(line(&lines, 0), "▒".repeat(64));
    assert_eq!(line(&lines, 1), "·".repeat(64));
    let lines = drawn(&["show", "latest"]);
    let [before, between, after] = ["▒", "▒", "▒"];
    assert_eq!(line(&lines, 0), format!("{before}○{}█{}", between.repeat(30), after.repeat(31)));
    assert_eq!(line(&lines, 4), format!("{}█{}", "·".repeat(44), "·".repeat(19)));
    // The same of the driver, with no repository.
    let lines_of_driver = drawn(&["show", "--endpoint", &endpoint, "--base", "one", "--target", "two"]);
    for number in 0..8 {
        assert_eq!(line(&lines_of_driver, number), line(&lines, number), "line {number}");
    }
    let history = drawn(&["show", "--volume", "v"]);
    assert_eq!(history.iter().filter(|line| line.contains(" added")).count(), 2, "{history:?}");

    let html = place.path("show.html");
    drawn(&["show", "--html", arg(&html)]);
    let html = std::fs::read_to_string(html).expect("a file");
    assert_eq!(html.matches("<h2>").count(), 2);
    assert!(html.contains("class=\"c\"") && html.contains("class=\"z\"") && !html.contains("http"), "{html}");
}
