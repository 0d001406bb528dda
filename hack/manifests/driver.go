package main

import (
	"fmt"
	"os"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/kubernetes/test/e2e/storage/framework"
	"sigs.k8s.io/yaml"
)

// class is how a test driver's description names a class.
type class struct {
	FromName              bool
	FromFile              string
	FromExistingClassName string
}

// testDriver is what `e2e.test -storage.testdriver` reads (test/e2e/storage/external); the suite itself passes over
// what it does not know.
type testDriver struct {
	DriverInfo            framework.DriverInfo
	StorageClass          class
	VolumeAttributesClass class
	SnapshotClass         class
	GroupSnapshotClass    class
	InlineVolumes         []struct {
		Attributes map[string]string
		Shared     bool
		ReadOnly   bool
	}
	ClientNodeName string
	NodeSelectors  map[string]string
	Timeouts       map[string]string
}

var known = sets.New(
	framework.CapPersistence, framework.CapBlock, framework.CapFsGroup, framework.CapVolumeMountGroup,
	framework.CapExec, framework.CapSnapshotDataSource, framework.CapSnapshotMetadata,
	framework.CapVolumeGroupSnapshot, framework.CapPVCDataSource, framework.CapMultiPODs, framework.CapRWX,
	framework.CapControllerExpansion, framework.CapNodeExpansion, framework.CapOfflineExpansion,
	framework.CapOnlineExpansion, framework.CapVolumeLimits, framework.CapSingleNodeVolume, framework.CapTopology,
	framework.CapCapacity, framework.CapFSResizeFromSourceNotSupported, framework.CapReadWriteOncePod,
	framework.CapMultiplePVsSameID, framework.CapReadOnlyMany, framework.CapSELinuxMount,
)

// checkTestDriver decodes a description of a test driver strictly.
func checkTestDriver(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	driver := &testDriver{}
	if err := yaml.UnmarshalStrict(text, driver); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for name := range driver.DriverInfo.Capabilities {
		if !known.Has(name) {
			return fmt.Errorf("%s: %q is no capability of a test driver", path, name)
		}
	}
	return nil
}
