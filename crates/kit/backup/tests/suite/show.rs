//! What `show` draws.

use files::pattern::Image;

use crate::driver::Driver;
use crate::tool::{MIB, arg, ended, text};

#[test]
fn maps_show_data_and_changes_where_they_are() {
    let (place, driver) = Driver::anew();
    let (size, endpoint) = (512 * MIB, driver.endpoint());
    let file = place.open_image(size);
    let mut image = Image::default();
    // The first eighth: a line of the map is 64 MiB.
    image.write(&file, 0, 64 * 256, 1).expect("write");
    driver.snapshot("one", &image, size);
    driver.back_up(&place, "auto", "one");
    image.write(&file, 32 * 256, 1, 2).expect("write");
    image.punch(&file, 256, 256).expect("punch");
    image.write(&file, 300 * 256, 256, 3).expect("write");
    driver.snapshot("two", &image, size);
    driver.back_up(&place, "auto", "two");

    let drawn = |arguments: &[&str]| -> Vec<String> {
        let output = place.run(arguments);
        ended(0, &output);
        text(&output.stdout).lines().map(str::to_owned).collect()
    };
    // Each line of the map ends with its offset.
    let line = |lines: &[String], number: usize| -> String {
        let map = lines.iter().skip_while(|line| !line.is_empty()).nth(1 + number);
        map.expect("a line of the map").trim_start().chars().take(64).collect()
    };
    let full = place.list()[0].clone();
    let lines = drawn(&["show", &full]);
    assert_eq!(line(&lines, 0), "▒".repeat(64));
    assert_eq!(line(&lines, 1), "·".repeat(64));
    let lines = drawn(&["show", "latest"]);
    let [before, between, after] = ["▒", "▒", "▒"];
    assert_eq!(line(&lines, 0), format!("{before}○{}▂{}", between.repeat(30), after.repeat(31)));
    assert_eq!(line(&lines, 4), format!("{}█{}", "·".repeat(44), "·".repeat(19)));
    // The same of the driver, with no repository.
    let lines_of_driver = drawn(&["show", "--endpoint", &endpoint, "--base", "one", "--target", "two"]);
    for number in 0..8 {
        assert_eq!(line(&lines_of_driver, number), line(&lines, number), "line {number}");
    }
    let history = drawn(&["show", "--volume", "v"]);
    assert!(history[1].starts_with("BACKUP") && history[1].ends_with("CHANGED    ADDED"), "{history:?}");
    assert!(history[2].starts_with(&full) && history[2].contains("      full "), "{history:?}");
    assert!(history[3].contains("  2 MiB "), "{history:?}");
    assert!(history.iter().all(|line| line.chars().count() <= 80), "{history:?}");

    let html = place.path("show.html");
    drawn(&["show", "--html", arg(&html)]);
    let html = std::fs::read_to_string(html).expect("a file");
    assert_eq!(html.matches("<tr><th>").count(), 3, "{html}");
    assert!(
        html.contains("class=\"c2\"") && html.contains("class=\"z\"") && !html.contains("http"),
        "{html}"
    );
}
